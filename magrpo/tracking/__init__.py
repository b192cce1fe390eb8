"""Tracking with MLflow, one MLflow run for each training run. Only this package imports mlflow, inside functions."""
