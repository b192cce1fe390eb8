#!/usr/bin/env bash
# Databases and their owners. PostgreSQL's image runs this once, on an empty data folder; compose.yaml mounts it too.
set -euo pipefail

psql --username "$POSTGRES_USER" --set ON_ERROR_STOP=1 \
    --set prefect="$PREFECT_DATABASE_PASSWORD" --set mlflow="$MLFLOW_DATABASE_PASSWORD" <<'SQL'
CREATE ROLE prefect LOGIN PASSWORD :'prefect';
CREATE ROLE mlflow LOGIN PASSWORD :'mlflow';
CREATE DATABASE prefect OWNER prefect;
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_auth OWNER mlflow;
REVOKE CONNECT ON DATABASE prefect, mlflow, mlflow_auth FROM PUBLIC;
SQL
