# MLflow's server with PostgreSQL and its basic authentication. Built from the root of the repository.
FROM python:3.11.14-slim-bookworm

COPY requirements/cpu.txt requirements/services.txt /tmp/requirements/
RUN pip install --no-cache-dir -c /tmp/requirements/cpu.txt -r /tmp/requirements/services.txt mlflow \
    && rm -r /tmp/requirements \
    && useradd --uid 1000 --create-home mlflow \
    && install -d -o mlflow -g mlflow /var/lib/mlflow
COPY infra/images/mlflow-auth.ini /etc/mlflow/auth.ini

ENV MLFLOW_AUTH_CONFIG_PATH=/etc/mlflow/auth.ini \
    MLFLOW_DISABLE_TELEMETRY=true \
    MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
USER 1000
WORKDIR /var/lib/mlflow
EXPOSE 5000
CMD ["mlflow", "server", "--app-name", "basic-auth", "--host", "0.0.0.0", "--port", "5000", "--workers", "2", \
     "--backend-store-uri", "postgresql+psycopg:///mlflow", "--artifacts-destination", "/var/lib/mlflow/artifacts"]
