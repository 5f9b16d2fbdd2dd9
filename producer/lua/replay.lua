-- Move a dead letter back to its stream, under the same id, as a request that has no reply yet.
-- KEYS: dead letters, the tier's stream, reply, state
-- ARGV: the dead letter's entry, tier, encoding, state TTL in ms,
--       then the new entry's fields and values, without enqueued_ms
-- Returns: {'queued', entry}
--          {'gone'}          the dead letter is no longer there
--          {'busy', status}  the id is in use again
local dead, stream, reply, state = unpack(KEYS)
local letter, tier, encoding, state_ttl_ms = unpack(ARGV, 1, 4)

if #redis.call('XRANGE', dead, letter, letter) == 0 then
  return { 'gone' }
end
local status = redis.call('HGET', state, 'status')
if status == 'queued' or status == 'running' then
  return { 'busy', status }
end

local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local entry = redis.call('XADD', stream, '*', 'enqueued_ms', now, unpack(ARGV, 5))
redis.call('XDEL', dead, letter)
redis.call('DEL', reply, state)
redis.call('HSET', state, 'status', 'queued', 'tier', tier, 'entry', entry, 'encoding', encoding, 'enqueued_ms', now)
redis.call('PEXPIRE', state, state_ttl_ms)
return { 'queued', entry }
