"""Validation: is a checkpoint the drafter of its file, and does it draft what its base would say?

::

    from mtp_extract.validation.page import write_validation
    from mtp_extract.validation.plan import ValidationPlan
    from mtp_extract.validation.run import run_validation

    found = run_validation(ValidationPlan(Path("DIR"), base="google/gemma-4-E4B-it", source="gemma-4-E4B-it.litertlm"))
    write_validation(found, Path("report"))

Identity (:mod:`mtp_extract.pipeline.identity`) answers the first question; transformers and Google's ``interpreter``
are asked, too, on random inputs (``parity``). The second is measured over the base's own text: what is drafted after
every token, with one thing broken at a time too (``controls``), and what drafts are ``worth``. ``run`` puts them
together in a record that says what it means (``result``), ``page`` shows it.
"""
