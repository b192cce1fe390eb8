#!/usr/bin/env bash
# restore.sh [--compose] [--replace] BACKUP: put what backup.sh wrote back in its place. Stop the servers
# and workers first. Refuses a place that is not empty, unless --replace is given. stores.sh says where the places are.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/stores.sh"
replace=0
if [[ ${1:-} == --replace ]]; then
    replace=1
    shift
fi
(($# == 1)) || fail "usage: restore.sh [--compose] [--replace] BACKUP"
backup=$1
[[ -f $backup/SHA256SUMS ]] || fail "$backup is no backup: it has no SHA256SUMS"
(cd "$backup" && sha256sum --check --quiet SHA256SUMS) || fail "$backup is damaged; nothing was restored"

umask 077
names=()
for name in prefect mlflow mlflow-auth; do
    [[ ! -e $backup/$name.sqlite && ! -e $backup/$name.pgdump ]] || names+=("$name")
done

tables() { "${in_postgres[@]}" psql --no-psqlrc -Atc "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'" "$1"; }

# Everything is looked at before anything is changed.
for name in "${names[@]}"; do
    database=${DATABASES[$name]}
    if is_postgres "$database"; then
        [[ -e $backup/$name.pgdump ]] || fail "$name: the backup is of SQLite, $database is not; nothing was restored"
        count=$(tables "$database") || fail "$name: cannot ask $database; nothing was restored"
        ((count == 0 || replace)) || fail "$name: $database is not empty; --replace puts the backup in its place"
    else
        [[ -e $backup/$name.sqlite ]] || fail "$name: the backup is of PostgreSQL, $database is not; nothing was restored"
        [[ ! -e $database ]] || ((replace)) || fail "$database exists; --replace puts the backup in its place"
        [[ -z $(find /proc/[0-9]*/fd -lname "$(realpath -m "$database")" 2>/dev/null) ]] ||
            fail "a process has $database open: stop the servers first"
    fi
done
# shellcheck disable=SC2016
empty='[ -z "$(ls -A "$1" 2>/dev/null)" ]'
"${in_store[@]}" sh -c "$empty" sh "$ARTIFACTS" || ((replace)) ||
    fail "$ARTIFACTS is not empty; --replace puts the backup in its place"

for name in "${names[@]}"; do
    database=${DATABASES[$name]}
    if is_postgres "$database"; then
        # One transaction: the old content stays if anything fails.
        "${in_postgres[@]}" pg_restore --clean --if-exists --no-owner --no-privileges --single-transaction \
            --dbname="$database" <"$backup/$name.pgdump"
    else
        mkdir -p "$(dirname "$database")"
        cp "$backup/$name.sqlite" "$database.restoring"
        rm -f "$database-wal" "$database-shm" # they belong to the old file
        mv "$database.restoring" "$database"
    fi
    echo "$name: restored"
done

# Unpacked beside the place, then swapped: a full disk leaves the old artifacts as they were.
# shellcheck disable=SC2016
"${in_store[@]}" sh -euc '
    rm -rf "$1.restoring"
    mkdir -p "$1.restoring"
    tar -C "$1.restoring" -xzf -
    rm -rf "$1"
    mv "$1.restoring" "$1"
' sh "$ARTIFACTS" <"$backup/artifacts.tar.gz"
echo "artifacts: restored"
