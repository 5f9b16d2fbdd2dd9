-- Move a dead letter back to its stream, under the same id, as a request that has no reply yet.
--
-- KEYS  1 dead  2 stream  3 state  4 reply
-- ARGV  1 the dead letter's entry  2 tier  3 encoding  4 state TTL ms
--       5... the new entry's fields and values, without enqueued_ms
-- Returns {'queued', entry}, or {'gone'} where the dead letter is no longer there, or {'busy', status} where the id is in use again.
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then
    return {'gone'}
end
local status = redis.call('HGET', KEYS[3], 'status')
if status == 'queued' or status == 'running' then
    return {'busy', status}
end

local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local fields = {'enqueued_ms', now}
for i = 5, #ARGV do
    fields[#fields + 1] = ARGV[i]
end
local entry = redis.call('XADD', KEYS[2], '*', unpack(fields))
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[3], KEYS[4])
redis.call('HSET', KEYS[3], 'status', 'queued', 'tier', ARGV[2], 'entry', entry, 'encoding', ARGV[3], 'enqueued_ms', now)
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return {'queued', entry}
