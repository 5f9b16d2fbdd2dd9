#!lua flags=allow-oom
-- Hand entries back: idle since ever, so that the next claim takes them at once, and the other workers, or one of them, are told
-- to claim now.
-- KEYS: both tiers' streams, control, then each entry's state
-- ARGV: group, consumer, length to keep the control stream at, the worker to be told or '' for all,
--       then for each entry: tier's index, entry, delivery count to leave it with ('less': one less than it has, '': what it has)
-- Returns: how many were handed back
local group, consumer = ARGV[1], ARGV[2]
local released = 0
for i = 1, #KEYS - 3 do
  local at = 3 * i + 2
  local stream, entry, state = KEYS[tonumber(ARGV[at])], ARGV[at + 1], KEYS[3 + i]
  local where, count = holder(stream, group, consumer, entry)
  if where == 'own' then
    if ARGV[at + 2] == 'less' then
      count = math.max(0, count - 1)
    elseif ARGV[at + 2] ~= '' then
      count = ARGV[at + 2]
    end
    redis.call('XCLAIM', stream, group, consumer, 0, entry, 'TIME', 0, 'RETRYCOUNT', count, 'JUSTID')
    if redis.call('HGET', state, 'status') == 'running' then
      redis.call('HSET', state, 'status', 'queued')
    end
    released = released + 1
  end
end
if released > 0 then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'op', 'claim', 'worker', consumer, 'for', ARGV[4])
end
return released
