#!lua flags=allow-oom
-- Take over entries that have been idle for too long. The delivery count stays as it is: what counts is that a request is begun.
-- KEYS: the tier's stream
-- ARGV: group, consumer, least idle time in ms, where to go on in the pending list, at most how many
-- Returns: where to go on next time ('0-0': all of it was seen), and the entries
local stream = unpack(KEYS)
local group, consumer, min_idle_ms, cursor, count = unpack(ARGV)

local claimed = redis.call('XAUTOCLAIM', stream, group, consumer, min_idle_ms, cursor, 'COUNT', count, 'JUSTID')
local next_cursor, ids = claimed[1], claimed[2]
local entries = {}
for _, id in ipairs(ids) do
  entries[#entries + 1] = redis.call('XRANGE', stream, id, id)[1]
end
return { next_cursor, entries }
