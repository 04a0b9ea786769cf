# Read by the two scripts beside it. Set by the pod: ANNOUNCE_HOST, FIRST, SENTINELS, and passwords.
set -eu
umask 077
DATA=${DATA:-/data}
RUN=${RUN:-/run/redis}
CONFIG=${CONFIG:-/etc/redis}
REDIS_PORT=${REDIS_PORT:-6379}
SENTINEL_PORT=${SENTINEL_PORT:-26379}
STATE=$DATA/sentinel.conf

digest() { printf '%s' "$1" | sha256sum | cut -d ' ' -f 1; }

# "host port" of the primary: as any Sentinel says, or as ours knew when it ended, or the first server when all is new.
primary() {
  for address in $SENTINELS; do
    found=$(timeout 2 valkey-cli -h "${address%:*}" -p "${address##*:}" --user probe --pass none --no-auth-warning \
      sentinel get-master-addr-by-name tandem 2>/dev/null | tr '\n' ' ') || continue
    case $found in
      *[a-zA-Z0-9]' '[0-9]*' ') echo "${found% }"; return ;;
    esac
  done
  known=$(sed -n 's/^sentinel monitor tandem \(.*\) 2$/\1/p' "$STATE" 2>/dev/null) || true
  echo "${known:-$FIRST}"
}
