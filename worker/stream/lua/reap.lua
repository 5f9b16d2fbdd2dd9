#!lua flags=allow-oom
-- Remove a dead worker's consumers, each only where it has nothing pending (removing it would drop that).
-- KEYS: the worker's heartbeat, both tiers' streams
-- ARGV: group, consumer
-- Returns: how many were removed
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
local removed = 0
for i = 2, 3 do
  local pending = redis.pcall('XPENDING', KEYS[i], ARGV[1], '-', '+', 1, ARGV[2])
  if not pending.err and #pending == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], ARGV[2])
    removed = removed + 1
  end
end
return removed
