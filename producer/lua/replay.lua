-- Move a dead letter back to its stream, under the same id, as a request that has no reply yet.
-- KEYS: dead letters, the tier's stream, reply, state
-- ARGV: the dead letter's entry, when it died in ms, tier, encoding, state TTL in ms,
--       then the new entry's fields and values, without enqueued_ms
-- Returns: {'queued', entry}
--          {'gone'}              the dead letter is no longer there
--          {'busy', status}      the id is in use again
--          {'answered', status}  the id was in use again, and has a reply that does not belong to this death
local dead, stream, reply, state = unpack(KEYS)
local letter, dead_ms, tier, encoding, state_ttl_ms = unpack(ARGV, 1, 5)

if #redis.call('XRANGE', dead, letter, letter) == 0 then
  return { 'gone' }
end
local status, finished_ms = unpack(redis.call('HMGET', state, 'status', 'finished_ms'))
if status == 'queued' or status == 'running' then
  return { 'busy', status }
elseif status and finished_ms ~= dead_ms then
  return { 'answered', status }
end

local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local entry = redis.call('XADD', stream, '*', 'enqueued_ms', now, unpack(ARGV, 6))
redis.call('XDEL', dead, letter)
redis.call('DEL', reply, state)
redis.call('HSET', state, 'status', 'queued', 'tier', tier, 'entry', entry, 'encoding', encoding, 'enqueued_ms', now)
redis.call('PEXPIRE', state, state_ttl_ms)
return { 'queued', entry }
