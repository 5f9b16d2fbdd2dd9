#!lua flags=allow-oom
-- Remove a dead worker's consumers, each only if it has nothing pending (removing it would drop that).
-- KEYS: the worker's heartbeat, then the tiers' streams
-- ARGV: group, consumer
-- Returns: how many were removed
local heartbeat = KEYS[1]
local streams = { unpack(KEYS, 2) }
local group, consumer = unpack(ARGV)

if redis.call('EXISTS', heartbeat) == 1 then
  return 0
end
local removed = 0
for _, stream in ipairs(streams) do
  local pending = redis.pcall('XPENDING', stream, group, '-', '+', 1, consumer)
  if not pending.err and #pending == 0 then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
    removed = removed + 1
  end
end
return removed
