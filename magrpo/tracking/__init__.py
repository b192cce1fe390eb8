"""Recording runs in MLflow, one MLflow run for each training run. Only this package imports mlflow, inside functions.

Begin with ``outbox``: records are written to a file in the run directory and sent from there. ``mlflow_runs`` receives
them, ``traces`` turns trajectories into MLflow traces, ``experiment_view`` arranges the page of MLflow, and
``model_registry`` keeps trained teams. ``connection`` checks the addresses of stores and translates their errors.
"""
