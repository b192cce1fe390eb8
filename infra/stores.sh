# Sourced by backup.sh and restore.sh: where the databases and the artifacts are. Takes the first argument if it is
# --compose: the containers of Compose (by the command in $COMPOSE, default: docker compose). Otherwise SQLite files in
# $RUNS, or what PREFECT_DB, MLFLOW_DB, MLFLOW_AUTH_DB (a file or postgresql://...) and ARTIFACTS (a folder) name.
# shellcheck shell=bash
RUNS=${RUNS:-runs}
ARTIFACTS=${ARTIFACTS:-$RUNS/mlartifacts}
declare -A DATABASES=(
    [prefect]=${PREFECT_DB:-$RUNS/prefect/prefect.db}
    [mlflow]=${MLFLOW_DB:-$RUNS/mlflow.db}
    [mlflow-auth]=${MLFLOW_AUTH_DB:-$RUNS/mlflow-auth.db}
)
in_postgres=() # the command that runs another where PostgreSQL is
in_store=()    # and where the artifacts are
if [[ ${1:-} == --compose ]]; then
    read -ra compose <<<"${COMPOSE:-docker compose}"
    in_postgres=("${compose[@]}" --file "$here/compose.yaml" exec -T postgres)
    in_store=("${compose[@]}" --file "$here/compose.yaml" run --rm --no-deps -T mlflow)
    shift
    # By the socket inside the container, whose owner may be anyone; each database as its own owner.
    DATABASES=(
        [prefect]='postgresql:///prefect?user=prefect'
        [mlflow]='postgresql:///mlflow?user=mlflow'
        [mlflow-auth]='postgresql:///mlflow_auth?user=mlflow'
    )
    ARTIFACTS=/var/lib/mlflow/artifacts
fi

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    exit 1
}

is_postgres() { [[ $1 == postgresql://* ]]; }
