#!/usr/bin/env bash
# backup.sh [--compose] FOLDER: copy both servers' databases and the artifacts to a dated folder in
# FOLDER, while everything runs. stores.sh says where they are looked for.
#   KEEP  how many backups to keep in FOLDER, the newest (default: all)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/stores.sh"
(($# == 1)) || fail "usage: backup.sh [--compose] FOLDER"

umask 077
folder=$1
stamp=$(date -u +%Y-%m-%dT%H%M%SZ)
part=$folder/.partial-$stamp
mkdir -p "$folder"
mkdir "$part"
trap 'rm -rf "$part"' EXIT
[[ ! -e $folder/$stamp ]] || fail "$folder/$stamp exists"

dump_sqlite() { # by SQLite's own online backup: a plain copy of a database in use may be torn
    python3 - "$1" "$2" <<'PY'
import sqlite3, sys
from contextlib import closing

with closing(sqlite3.connect(sys.argv[1])) as source, closing(sqlite3.connect(sys.argv[2])) as copy:
    source.backup(copy)
    verdict = copy.execute("PRAGMA integrity_check").fetchone()[0]
sys.exit(None if verdict == "ok" else f"{sys.argv[1]} is damaged: {verdict}")
PY
}

found=0
for name in prefect mlflow mlflow-auth; do
    database=${DATABASES[$name]}
    if is_postgres "$database"; then
        "${in_postgres[@]}" pg_dump --format=custom --no-owner --no-privileges --dbname="$database" >"$part/$name.pgdump"
    elif [[ -f $database ]]; then
        dump_sqlite "$database" "$part/$name.sqlite"
    else
        echo "$name: no $database, left out"
        continue
    fi
    found=1
done
((found)) || fail "no database found: set RUNS, or PREFECT_DB and MLFLOW_DB"

# After the databases: a run that is in them then has its artifacts here too.
status=0
# shellcheck disable=SC2016
"${in_store[@]}" sh -c 'mkdir -p "$1" || exit 2; tar -C "$1" -czf - .' sh "$ARTIFACTS" >"$part/artifacts.tar.gz" || status=$?
# tar's 1: a file changed while it was read, so a run is still writing it, and has not recorded it yet
((status <= 1)) || fail "could not read the artifacts in $ARTIFACTS"
# and that of `docker compose run` for errors of its own, after which the archive is empty or cut
gzip -t "$part/artifacts.tar.gz" || fail "the archive of the artifacts is incomplete"

(cd "$part" && sha256sum -- * >SHA256SUMS)
mv "$part" "$folder/$stamp"
trap - EXIT
du -sh "$folder/$stamp"

if [[ -n ${KEEP:-} ]]; then
    find "$folder" -mindepth 1 -maxdepth 1 -type d -name '20*Z' | sort | head -n "-$KEEP" | xargs -r -d '\n' rm -rf --
fi
