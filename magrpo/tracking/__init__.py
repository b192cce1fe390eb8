"""Recording runs in MLflow, one MLflow run for each training run. Only this package imports mlflow, inside functions.

Records are written to the outbox of the run directory and sent from there (``outbox``, where to begin); ``mlflow_runs``
is the receiver, ``traces`` turns trajectories into MLflow's traces, ``experiment_view`` arranges MLflow's page, and
``model_registry`` keeps trained teams. ``connection`` checks the addresses of stores and translates their errors.
"""
