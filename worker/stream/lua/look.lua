#!lua flags=allow-oom
-- Read new entries without waiting, as XREADGROUP does, but for the delivery count: what counts is that a request is begun.
-- KEYS: streams
-- ARGV: group, consumer, at most how many of each
-- Returns: what XREADGROUP does, and an empty list where there is nothing
local command = { 'XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', unpack(KEYS) }
for _ = 1, #KEYS do
  command[#command + 1] = '>'
end
local reply = redis.call(unpack(command)) or {}
for _, read in ipairs(reply) do
  for _, entry in ipairs(read[2]) do
    redis.call('XCLAIM', read[1], ARGV[1], ARGV[2], 0, entry[1], 'RETRYCOUNT', 0, 'JUSTID')
  end
end
return reply
