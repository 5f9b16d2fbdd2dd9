#!lua flags=allow-oom
-- Read new entries without waiting, like XREADGROUP but without counting a delivery: it counts when a request is begun.
-- KEYS: streams
-- ARGV: group, consumer, at most how many of each
-- Returns: what XREADGROUP does, and an empty list if there is nothing
local streams = KEYS
local group, consumer, count = unpack(ARGV)

local command = { 'XREADGROUP', 'GROUP', group, consumer, 'COUNT', count, 'STREAMS', unpack(streams) }
for _ = 1, #streams do
  command[#command + 1] = '>'
end
local reply = redis.call(unpack(command)) or {}
for _, read in ipairs(reply) do
  local stream, entries = read[1], read[2]
  for _, entry in ipairs(entries) do
    redis.call('XCLAIM', stream, group, consumer, 0, entry[1], 'RETRYCOUNT', 0, 'JUSTID')
  end
end
return reply
