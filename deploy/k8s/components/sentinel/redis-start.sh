#!/bin/sh
# One of the servers: the primary, or a replica of it. Which one may change; then Sentinel says so and rewrites this.
. "$(dirname "$0")/redis-common.sh"
cat > "$RUN/users.acl" <<ACL
user default off
user tandem on #$(digest "$TANDEM_REDIS_PASSWORD") ~pfx:* -@all +ping +select +evalsha +eval +get +mget +set +del +incrby +exists +expire +pttl +hget +hset +hdel +hgetall +xadd +xread
user ray on #$(digest "$RAY_REDIS_PASSWORD") ~RAY* ~DUMMY &* +@all -@dangerous +info
user probe on nopass -@all +ping
user replica on #$(digest "$REPLICATION_PASSWORD") -@all +psync +replconf +ping
user sentinel on #$(digest "$REPLICATION_PASSWORD") &* -@all +multi +exec +replicaof +slaveof +ping +subscribe +publish +config|rewrite +role +info +client|setname +client|kill +script|kill
ACL
own="$ANNOUNCE_HOST $REDIS_PORT"
{
  grep -v '^port \|^aclfile \|^dir ' "$CONFIG/redis.conf"
  echo "port $REDIS_PORT"
  echo "dir $DATA"
  echo "aclfile $RUN/users.acl"
  echo "replica-announce-ip $ANNOUNCE_HOST"
  echo "replica-announce-port $REDIS_PORT"
  echo "primaryuser replica"
  echo "primaryauth $REPLICATION_PASSWORD"
  echo "repl-diskless-sync-delay 0"
  # a primary that lost its replicas, as in a split network, takes no more writes
  echo "min-replicas-to-write ${MIN_REPLICAS:-1}"
  primary=$(primary)
  [ "$primary" = "$own" ] || echo "replicaof $primary"
} > "$RUN/redis.conf"
exec valkey-server "$RUN/redis.conf"
