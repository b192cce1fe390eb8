#!/bin/bash
# Makes the data folder once, runs the scripts of /docker-entrypoint-initdb.d, starts the server.
set -euo pipefail

if [[ $(id -u) == 0 ]]; then
    mkdir -p "$PGDATA"
    chown -R postgres:postgres "$PGDATA" /var/run/postgresql
    exec gosu postgres "$0" "$@"
fi
export POSTGRES_USER=${POSTGRES_USER:-postgres}
if [[ ! -s $PGDATA/PG_VERSION ]]; then
    mkdir -p -m 700 "$PGDATA"
    initdb --username="$POSTGRES_USER" --pwfile=<(echo "$POSTGRES_PASSWORD") --auth-local=trust --auth-host=scram-sha-256
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    pg_ctl --wait --options="-c listen_addresses=''" start
    for script in /docker-entrypoint-initdb.d/*.sh; do
        # shellcheck source=/dev/null
        . "$script"
    done
    pg_ctl --wait --mode=fast stop
fi
exec postgres -c listen_addresses='*'
