"""How the index lies in Redis, and the scripts that read and write it there.

    pfx:{namespace}:b:<2 bytes>   hash: the other 8 bytes of a block's name -> who holds it
    pfx:{namespace}:w:<4 bytes>   lease of one owner: "<sequence number>:<1 if all that it holds was stated>"
    pfx:{namespace}:era           drawn when the index begins: another one means that everything was lost in between
    pfx:{namespace}:turn          who sweeps at the moment, and :cursor, where the next one goes on
    pfx:{namespace}:routes        stream of what gateways routed lately (exchange.py)

An *owner* is one incarnation of a worker, named by a digest of (worker id, epoch). "Who holds it" is a string of
records of 5 bytes, in order: the owner's tag, and a mask of the tiers in which it holds the block. A new epoch is
another tag, so whatever an earlier incarnation said means nothing from the moment that nobody asks for it; the sweep
only takes away the litter.

Blocks are named by the first 10 bytes of their keys, which are chained digests: 2^-80 to mistake one for another, and
then it is one wrong hint. The 65,536 hashes keep Redis's compact form (a "listpack") up to 512 entries each: 33 million
blocks. The braces keep a cluster's keys in one slot, so that one script may use them all.

Everything a script reads may be of another type or shape than expected: such an entry counts as absent to readers and
is replaced by writers.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b, sha1

Holder = tuple[str, int]
"""(worker id, epoch)"""

NAME_BYTES = 10
"""Of a block's key, that name it in the index."""
TAG_BYTES = 4
RECORD_BYTES = TAG_BYTES + 1
NUM_BUCKETS = 1 << 16
BUCKET_TTL_S = 1800
"""What remains when a whole cluster is gone, goes after this. The sweep renews it."""
ERA_TTL_S = 86_400
SWEEP_ENTRIES = 1024
MAX_PROBES = 512
"""Look-ups of one prompt's blocks within one script: some 0.5 ms."""
MAX_OWNER_BYTES = 128 << 10
"""In one script's answer."""

CONSTANTS = {
    "RECORD_BYTES": RECORD_BYTES,
    "TAG_BYTES": TAG_BYTES,
    "NUM_BUCKETS": NUM_BUCKETS,
    "BUCKET_TTL_S": BUCKET_TTL_S,
    "ERA_TTL_S": ERA_TTL_S,
    "SWEEP_ENTRIES": SWEEP_ENTRIES,
    "MAX_PROBES": MAX_PROBES,
    "MAX_OWNER_BYTES": MAX_OWNER_BYTES,
}
"""What scripts may name."""


def index_prefix(namespace: str) -> str:
    return f"pfx:{{{namespace}}}:"


@lru_cache(maxsize=65_536)
def owner_tag(holder: Holder) -> bytes:
    """4 bytes. Two live owners among a thousand share one with a chance of 1 in 10,000: then one gets hints of both."""
    worker_id, epoch = holder
    return blake2b(f"{epoch}:{worker_id}".encode(), digest_size=TAG_BYTES, person=b"tandem-owner").digest()


class Script:
    """A Lua script and the name under which Redis caches it."""

    def __init__(self, source: str) -> None:
        for name, value in CONSTANTS.items():
            source = source.replace(name, str(value))
        self.source = source
        self.sha = sha1(source.encode(), usedforsecurity=False).hexdigest()


# KEYS: prefix. ARGV: the prompt's block keys in order, 16 bytes each.
# -> era, number of unreadable entries, then pairs (position, owners of the block there), positions rising.
#
# Workers give blocks up leaves first, so each holds a beginning of the prompt: whoever holds two blocks of it holds all
# between them, and where two blocks have the same owners nothing changes in between. Intervals whose ends differ are
# halved, level by level, until each change lies between two neighbours, or the probes are used up and the lower end
# stands for all. Litter of dead owners costs probes, never a wrong answer about the living.
LOOK_UP = Script("""
local prefix, keys = KEYS[1], ARGV[1]
local num_blocks, num_probes, num_unreadable = #keys / 16, 0, 0
local era = redis.pcall('GET', prefix .. 'era')
if type(era) ~= 'string' then era = '' end
local owners_of = {}
local function probe(position)
  local start = 16 * position - 15
  local owners = redis.pcall('HGET', prefix .. 'b:' .. keys:sub(start, start + 1), keys:sub(start + 2, start + 9))
  num_probes = num_probes + 1
  if not owners then
    owners = ''
  elseif type(owners) == 'table' or #owners % RECORD_BYTES ~= 0 then
    num_unreadable = num_unreadable + 1
    owners = ''
  end
  owners_of[position] = owners
  return owners
end
if num_blocks == 0 or probe(1) == '' then return {era, num_unreadable} end
local edges, open = {}, {}
if num_blocks > 1 then
  probe(num_blocks)
  open = {1, num_blocks}
end
while #open > 0 do
  local narrower = {}
  for pair = 1, #open, 2 do
    local low, high = open[pair], open[pair + 1]
    if owners_of[low] ~= owners_of[high] then
      if high - low == 1 or num_probes >= MAX_PROBES then
        edges[#edges + 1] = low
      else
        local middle = math.floor((low + high) / 2)
        probe(middle)
        local count = #narrower
        narrower[count + 1], narrower[count + 2], narrower[count + 3], narrower[count + 4] = low, middle, middle, high
      end
    end
  end
  open = narrower
end
edges[#edges + 1] = num_blocks
table.sort(edges)
local num_bytes = 0
for _, position in ipairs(edges) do num_bytes = num_bytes + #owners_of[position] end
local stride = math.max(1, math.ceil(num_bytes / MAX_OWNER_BYTES))
local answer = {era, num_unreadable}
for edge = (#edges - 1) % stride + 1, #edges, stride do
  local owners = owners_of[edges[edge]]
  if owners ~= '' then
    answer[#answer + 1] = edges[edge]
    answer[#answer + 1] = owners
  end
end
return answer
""")

# KEYS: prefix. ARGV: tag, sequence number, 1 if all that the owner holds was stated, seconds of the lease, an era to
# begin if there is none, masks of stored blocks (1 byte each), their names (10 bytes each), names of removed blocks.
# -> the sequence number that the lease had before, 1 if there was an era.
#
# Removals first: they go through even when Redis takes nothing new for want of memory.
PUBLISH = Script("""
local prefix, tag, masks, stored, removed = KEYS[1], ARGV[1], ARGV[6], ARGV[7], ARGV[8]
local function owners_of(bucket, field)
  local owners = redis.pcall('HGET', bucket, field)
  if type(owners) == 'table' then
    redis.call('DEL', bucket)
    return ''
  end
  if not owners or #owners % RECORD_BYTES ~= 0 then return '' end
  return owners
end
local function number_of(owners, start)
  local a, b, c, d = owners:byte(start, start + 3)
  return ((a * 256 + b) * 256 + c) * 256 + d
end
local own = number_of(tag, 1)
local function place_of(owners)
  local low, high = 0, #owners / RECORD_BYTES
  while low < high do
    local middle = math.floor((low + high) / 2)
    if number_of(owners, RECORD_BYTES * middle + 1) < own then low = middle + 1 else high = middle end
  end
  local start = RECORD_BYTES * low + 1
  return start, owners:sub(start, start + TAG_BYTES - 1) == tag
end
for start = 1, #removed, 10 do
  local bucket, field = prefix .. 'b:' .. removed:sub(start, start + 1), removed:sub(start + 2, start + 9)
  local owners = owners_of(bucket, field)
  local at, is_there = place_of(owners)
  if is_there then
    owners = owners:sub(1, at - 1) .. owners:sub(at + RECORD_BYTES)
    if owners == '' then redis.call('HDEL', bucket, field) else redis.call('HSET', bucket, field, owners) end
  end
end
local before = redis.pcall('GET', prefix .. 'w:' .. tag)
if type(before) ~= 'string' then before = '' end
local is_whole = before ~= '' and ARGV[3] or '0'
redis.call('SET', prefix .. 'w:' .. tag, ARGV[2] .. ':' .. is_whole, 'EX', ARGV[4])
local had_era = type(redis.pcall('GET', prefix .. 'era')) == 'string'
if not had_era then redis.call('SET', prefix .. 'era', ARGV[5]) end
redis.call('EXPIRE', prefix .. 'era', ERA_TTL_S)
for number = 1, #masks do
  local start, mask = 10 * number - 9, masks:sub(number, number)
  local bucket, field = prefix .. 'b:' .. stored:sub(start, start + 1), stored:sub(start + 2, start + 9)
  local owners = owners_of(bucket, field)
  local at, is_there = place_of(owners)
  local is_new = owners == '' and redis.call('EXISTS', bucket) == 0
  local behind = is_there and at + RECORD_BYTES or at
  local now = owners:sub(1, at - 1) .. tag .. mask .. owners:sub(behind)
  if now ~= owners then redis.call('HSET', bucket, field, now) end
  if is_new then redis.call('EXPIRE', bucket, BUCKET_TTL_S) end
end
return {before:match('^[^:]*'), had_era and 1 or 0}
""")

# KEYS: prefix. ARGV: tag, names of blocks (10 bytes each). -> the numbers, from 0, of those that the owner is not said
# to hold.
AUDIT = Script("""
local prefix, tag, names = KEYS[1], ARGV[1], ARGV[2]
local missing = {}
for start = 1, #names, 10 do
  local owners = redis.pcall('HGET', prefix .. 'b:' .. names:sub(start, start + 1), names:sub(start + 2, start + 9))
  local is_held = false
  if type(owners) == 'string' and #owners % RECORD_BYTES == 0 then
    for record = 1, #owners, RECORD_BYTES do
      if owners:sub(record, record + TAG_BYTES - 1) == tag then is_held = true break end
    end
  end
  if not is_held then missing[#missing + 1] = (start - 1) / 10 end
end
return missing
""")

# KEYS: prefix. ARGV: tag, milliseconds, number of buckets. -> the first of these buckets, for the caller to sweep in
# that time, or -1 when it is somebody else's turn.
TAKE_TURN = Script("""
local turn, cursor, count = KEYS[1] .. 'turn', KEYS[1] .. 'cursor', tonumber(ARGV[3])
if redis.call('PTTL', turn) == -1 then redis.call('DEL', turn) end
if not redis.call('SET', turn, ARGV[1], 'NX', 'PX', ARGV[2]) then return -1 end
local last = redis.pcall('INCRBY', cursor, count)
if type(last) ~= 'number' or last < 0 then
  redis.call('SET', cursor, count)
  last = count
end
redis.call('EXPIRE', cursor, ERA_TTL_S)
return (last - count) % NUM_BUCKETS
""")

# KEYS: prefix. ARGV: tag, first bucket, the one behind the last. Takes away what dead owners and strangers left there,
# and renews the buckets; stops early when it has seen enough for one call (some 1 ms).
# -> the bucket to go on with; the names, 10 bytes each in one string, of blocks that the owner with this tag is said to
# hold.
SWEEP = Script("""
local prefix, tag, number, last = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local alive, own, num_seen = {}, {}, 0
local function is_alive(owner)
  if alive[owner] == nil then alive[owner] = redis.call('EXISTS', prefix .. 'w:' .. owner) == 1 end
  return alive[owner]
end
while number < last and num_seen < SWEEP_ENTRIES do
  local name = string.char(math.floor(number / 256), number % 256)
  local bucket = prefix .. 'b:' .. name
  local entries = redis.pcall('HGETALL', bucket)
  if entries['err'] then
    redis.call('DEL', bucket)
    entries = {}
  end
  for entry = 1, #entries, 2 do
    local field, owners, kept = entries[entry], entries[entry + 1], {}
    if #field == 8 and #owners % RECORD_BYTES == 0 then
      for record = 1, #owners, RECORD_BYTES do
        local owner = owners:sub(record, record + TAG_BYTES - 1)
        if owner == tag then own[#own + 1] = name .. field end
        if is_alive(owner) then kept[#kept + 1] = owners:sub(record, record + RECORD_BYTES - 1) end
      end
    end
    if #kept == 0 then
      redis.call('HDEL', bucket, field)
    elseif #kept * RECORD_BYTES ~= #owners then
      redis.call('HSET', bucket, field, table.concat(kept))
    end
  end
  if #entries > 0 then redis.call('EXPIRE', bucket, BUCKET_TTL_S) end
  number = number + 1
  num_seen = num_seen + 1 + #entries / 2
end
return {number, table.concat(own)}
""")
