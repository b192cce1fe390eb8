#!/usr/bin/env bash
# make-env.sh FILE: write env.example with fresh random secrets to FILE, readable by its owner only. Never overwrites.
set -euo pipefail

template=$(dirname "${BASH_SOURCE[0]}")/env.example
file=${1:?usage: make-env.sh FILE}
if [[ -e $file ]]; then
    echo "$file exists, and a running installation may depend on its secrets: delete it yourself to make new ones" >&2
    exit 1
fi
umask 077
content=$(<"$template")
while read -r name; do
    # 32 hexadecimal digits: safe in a shell, a URL and an INI file alike
    content=${content//"$name"/$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
done < <(grep -v '^#' "$template" | grep -o '@[a-z-]*@' | sort -u)
printf '%s\n' "$content" >"$file"
echo "wrote $file"
