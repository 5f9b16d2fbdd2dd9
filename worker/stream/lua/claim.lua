#!lua flags=allow-oom
-- Take over entries that have been idle for too long. The delivery count stays as it is: what counts is that a request is begun.
-- KEYS: the tier's stream
-- ARGV: group, consumer, least idle time in ms, where to go on in the pending list, at most how many
-- Returns: where to go on next time ('0-0': all of it was seen), and the entries
local stream = KEYS[1]
local claimed = redis.call('XAUTOCLAIM', stream, ARGV[1], ARGV[2], ARGV[3], ARGV[4], 'COUNT', ARGV[5], 'JUSTID')
local entries = {}
for _, entry in ipairs(claimed[2]) do
  entries[#entries + 1] = redis.call('XRANGE', stream, entry, entry)[1]
end
return { claimed[1], entries }
