#!/bin/sh
# Users and their rights. Passwords come from a Secret and are kept as digests, in memory only.
set -eu
digest() { printf '%s' "$1" | sha256sum | cut -d ' ' -f 1; }
umask 077
cat > /run/redis/users.acl <<ACL
user default off
user tandem on #$(digest "$TANDEM_REDIS_PASSWORD") ~pfx:* -@all +ping +select +evalsha +eval +get +mget +set +del +incrby +exists +expire +pttl +hget +hset +hdel +hgetall +xadd +xread
user ray on #$(digest "$RAY_REDIS_PASSWORD") ~RAY* ~DUMMY &* +@all -@dangerous +info
user probe on nopass -@all +ping
ACL
exec valkey-server /etc/redis/redis.conf
