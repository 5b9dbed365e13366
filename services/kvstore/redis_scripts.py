"""What Redis does in one step: a kvstore that is killed between two orders leaves no half of one.

A room has three keys of its own beside its values: newcomers and what has been read since it came
(sorted sets, next to leave first), and sizes (a hash, with the sums of both under "n" and "u").
"""

# KEYS: newcomers, used ones, sizes, value.
# ARGV: member, value, ttl ms, rank, rank below which all is over, most bytes, overhead of each,
# "1" to replace, what the names of values begin with.
PUT = """
local fresh, used, sizes, key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local member, value, ttl, rank = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local most, names = tonumber(ARGV[6]), ARGV[9]
if ARGV[8] ~= '1' and redis.call('PEXPIRE', key, ttl) == 1 then return 0 end
local size = #value + tonumber(ARGV[7])
if size > most then return -1 end
local function count(of, bytes)
  redis.call('HINCRBY', sizes, of, bytes)
end
local function forget(name)
  local bytes = redis.call('HGET', sizes, name)
  local of = 'n'
  if redis.call('ZREM', used, name) == 1 then of = 'u' else redis.call('ZREM', fresh, name) end
  redis.call('DEL', names .. name)
  if bytes then
    redis.call('HDEL', sizes, name)
    count(of, -tonumber(bytes))
  end
end
local function sum(of) return tonumber(redis.call('HGET', sizes, of) or '0') end
local function first(set) return redis.call('ZRANGE', set, 0, 0)[1] end
forget(member)
for _, set in ipairs({fresh, used}) do
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', set, '-inf', ARGV[5], 'LIMIT', 0, 64)) do
    forget(name)
  end
end
while sum('n') + sum('u') + size > most do
  local name = sum('n') * 10 > most and first(fresh) or first(used) or first(fresh)
  if not name then
    redis.call('DEL', sizes)
    break
  end
  forget(name)
end
redis.call('SET', key, value, 'PX', ttl)
redis.call('HSET', sizes, member, size)
redis.call('ZADD', fresh, rank, member)
count('n', size)
for _, name in ipairs({fresh, used, sizes}) do
  if redis.call('PTTL', name) < 2 * ttl then redis.call('PEXPIRE', name, 2 * ttl) end
end
return 1
"""

# KEYS as above. ARGV: member, ttl ms ("0": as it is), rank. Returns the value.
GET = """
local value = redis.call('GET', KEYS[4])
if not value or ARGV[2] == '0' then return value end
redis.call('PEXPIRE', KEYS[4], ARGV[2])
local bytes = redis.call('HGET', KEYS[3], ARGV[1])
if bytes then
  if redis.call('ZREM', KEYS[1], ARGV[1]) == 1 then
    redis.call('HINCRBY', KEYS[3], 'n', -tonumber(bytes))
    redis.call('HINCRBY', KEYS[3], 'u', bytes)
  end
  redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
  for at = 2, 3 do
    if redis.call('PTTL', KEYS[at]) < 2 * ARGV[2] then
      redis.call('PEXPIRE', KEYS[at], 2 * ARGV[2])
    end
  end
end
return value
"""

# KEYS as above. ARGV: member. Returns whether it was there.
DROP = """
local bytes = redis.call('HGET', KEYS[3], ARGV[1])
if bytes then
  local of = 'n'
  if redis.call('ZREM', KEYS[2], ARGV[1]) == 1 then of = 'u'
  else redis.call('ZREM', KEYS[1], ARGV[1]) end
  redis.call('HDEL', KEYS[3], ARGV[1])
  redis.call('HINCRBY', KEYS[3], of, -tonumber(bytes))
end
return redis.call('DEL', KEYS[4])
"""

# ARGV: what the names of values begin with, then members. Returns a digit of each, 1: it is there.
WHICH = """
local found = {}
for at = 2, #ARGV do found[at - 1] = redis.call('EXISTS', ARGV[1] .. ARGV[at]) end
return table.concat(found)
"""
