"""Validation: check a drafter against its bundle, and measure acceptance with its base.

::

    from mtp_extract.validation.page import write_validation
    from mtp_extract.validation.plan import ValidationPlan
    from mtp_extract.validation.run import run_validation

    plan = ValidationPlan(Path("DIR"), base="google/gemma-4-E4B-it", source="gemma-4-E4B-it.litertlm")
    validation = run_validation(plan)
    write_validation(validation, Path("report"))

:mod:`mtp_extract.pipeline.identity` compares the checkpoint with the bundle; transformers (``parity``) and Google's
``interpreter`` run it on random inputs. Acceptance is measured along the base's own text: drafts after every token, the
same with one thing broken at a time (``controls``), and the rounds and times of generation (``worth``). ``run`` puts
all in a record (``result``), which ``page`` shows.
"""
