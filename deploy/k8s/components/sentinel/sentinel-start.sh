#!/bin/sh
# One of the Sentinels. What it knows of the others is kept from one start to the next; the rest is written anew.
. "$(dirname "$0")/redis-common.sh"
old=$(grep '^sentinel myid \|^sentinel known-\|^sentinel [a-z]*-epoch ' "$STATE" 2>/dev/null) || true
primary=$(primary)
{
  echo "port $SENTINEL_PORT"
  echo "dir $DATA"
  echo "user default off"
  echo "user tandem on #$(digest "$TANDEM_REDIS_PASSWORD") -@all +ping +sentinel|masters +sentinel|get-master-addr-by-name"
  echo "user ray on #$(digest "$RAY_REDIS_PASSWORD") -@all +ping +info +sentinel|masters"
  echo "user probe on nopass -@all +ping +sentinel|get-master-addr-by-name"
  echo "user sentinel on #$(digest "$REPLICATION_PASSWORD") &* -@all +ping +publish +subscribe +client|setname +sentinel|is-master-down-by-addr +sentinel|is-primary-down-by-addr"
  echo "sentinel resolve-hostnames yes"
  echo "sentinel announce-hostnames yes"
  echo "sentinel announce-ip $ANNOUNCE_HOST"
  echo "sentinel announce-port $SENTINEL_PORT"
  echo "sentinel sentinel-user sentinel"
  echo "sentinel sentinel-pass $REPLICATION_PASSWORD"
  printf '%s\n' "$old" | grep '^sentinel myid ' || true
  echo "sentinel monitor tandem $primary 2"
  echo "sentinel auth-user tandem sentinel"
  echo "sentinel auth-pass tandem $REPLICATION_PASSWORD"
  echo "sentinel down-after-milliseconds tandem ${DOWN_AFTER_MS:-5000}"
  echo "sentinel failover-timeout tandem 30000"
  echo "sentinel parallel-syncs tandem 1"
  printf '%s\n' "$old" | grep -v '^sentinel myid ' || true
} > "$STATE.new"
mv "$STATE.new" "$STATE"
exec valkey-sentinel "$STATE"
