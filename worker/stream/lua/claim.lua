#!lua flags=allow-oom
-- Take over entries that have been idle for too long. The delivery count does not change: it counts when a request is begun.
-- KEYS: the tier's stream
-- ARGV: group, consumer, least idle time in ms, where to continue in the pending list, at most how many
-- Returns: where to continue next time ('0-0': the list was read to its end), and the entries
local stream = unpack(KEYS)
local group, consumer, min_idle_ms, cursor, count = unpack(ARGV)

local claimed = redis.call('XAUTOCLAIM', stream, group, consumer, min_idle_ms, cursor, 'COUNT', count, 'JUSTID')
local next_cursor, ids = claimed[1], claimed[2]
local entries = {}
for _, id in ipairs(ids) do
  entries[#entries + 1] = redis.call('XRANGE', stream, id, id)[1]
end
return { next_cursor, entries }
