#!lua flags=allow-oom
-- Hand entries back, marked as idle long enough for the next claim to take them at once, and tell the other workers, or one of them,
-- to claim now.
-- KEYS: both tiers' streams, control, then each entry's state
-- ARGV: group, consumer, length to which the control stream is trimmed, the worker to be told or '' for all,
--       then for each entry: tier's index, entry, delivery count to leave it with ('less': one less than it has, '': what it has)
-- Returns: how many were handed back
local streams, control = { KEYS[1], KEYS[2] }, KEYS[3]
local states = { unpack(KEYS, 4) }
local group, consumer, control_length, recipient = unpack(ARGV, 1, 4)

local released = 0
for i, state in ipairs(states) do
  local at = 3 * i + 2
  local tier, entry, wanted_count = unpack(ARGV, at, at + 2)
  local stream = streams[tonumber(tier)]
  local where, count = holder(stream, group, consumer, entry)
  if where == 'own' then
    if wanted_count == 'less' then
      count = math.max(0, count - 1)
    elseif wanted_count ~= '' then
      count = wanted_count
    end
    redis.call('XCLAIM', stream, group, consumer, 0, entry, 'TIME', 0, 'RETRYCOUNT', count, 'JUSTID')
    if redis.call('HGET', state, 'status') == 'running' then
      redis.call('HSET', state, 'status', 'queued')
    end
    released = released + 1
  end
end
if released > 0 then
  redis.call('XADD', control, 'MAXLEN', '~', control_length, '*', 'op', 'claim', 'worker', consumer, 'for', recipient)
end
return released
