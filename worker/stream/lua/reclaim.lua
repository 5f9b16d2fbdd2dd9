#!lua flags=allow-oom
-- Deliver again what is pending for this consumer, but not what another has claimed since. The delivery count does not change.
-- KEYS: the tier's stream
-- ARGV: group, consumer, then the entries
-- Returns: delivery count and entry of each that is this consumer's and still on the stream
local stream = KEYS[1]
local group, consumer = unpack(ARGV, 1, 2)

local held = {}
for i = 3, #ARGV do
  local where, count = holder(stream, group, consumer, ARGV[i])
  if where == 'own' then
    redis.call('XCLAIM', stream, group, consumer, 0, ARGV[i], 'RETRYCOUNT', count, 'JUSTID')
    local entry = redis.call('XRANGE', stream, ARGV[i], ARGV[i])[1]
    if entry then
      held[#held + 1] = { count, entry }
    end
  end
end
return held
