#!/usr/bin/env bash
# Make this machine or pod a node without CPUs of a Ray cluster, run a command there, and leave with it.
#
#     infra/join-ray.sh HEAD:6379 COMMAND...
set -euo pipefail

head=${1:?usage: infra/join-ray.sh HEAD:6379 COMMAND...}
shift
export RAY_USAGE_STATS_ENABLED=0
ray start --address="$head" --num-cpus=0 --num-gpus=0 --object-store-memory=100000000
exec "$@"
