"""Validation: is a checkpoint the drafter of its file, and does it draft what its base would say?

::

    from mtp_extract.validate.page import write_validation
    from mtp_extract.validate.plan import ValidationPlan
    from mtp_extract.validate.run import run_validation

    found = run_validation(ValidationPlan(Path("DIR"), base="google/gemma-4-E4B-it", source="gemma-4-E4B-it.litertlm"))
    write_validation(found, Path("report"))

``identity`` answers the first question: config, tensors and what both compute, derived from the file anew; ``parity``
adds what transformers and Google's interpreter make of it. The second is measured: ``agreement`` (teacher-forced over
the base's own text), ``controls`` (the same with one thing broken), ``trivial`` (what needs no drafter), ``generation``
(speculative decoding). ``run`` puts them together in a record (``result``), ``verdict`` says what it means, ``page``
shows it.
"""
