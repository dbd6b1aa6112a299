"""Tuning: fitting a drafter to the base that it is served with, on what that base writes.

::

    from mtp_extract.tune.run import TuningPlan, run_tuning
    from mtp_extract.tune.setting import Setting

    tuned = run_tuning(TuningPlan(Setting(Path("DIR"), "google/gemma-4-E4B-it", Path("work")), Path("DIR-tuned")))
    overall = tuned.comparisons.overall
    print(overall.before.mean_accepted_length, overall.after.mean_accepted_length)
"""
