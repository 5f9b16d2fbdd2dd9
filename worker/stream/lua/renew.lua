#!lua flags=allow-oom
-- Renew leases. The delivery count is set, not raised: being renewed, or claimed twice by one worker, is no attempt.
-- KEYS: both tiers' streams
-- ARGV: group, consumer, then for each entry: tier's index, entry, delivery count or '' to leave it
-- Returns for each entry: 1, or 0 where it is lost
local group, consumer = ARGV[1], ARGV[2]
local results = {}
for i = 1, (#ARGV - 2) / 3 do
  local at = 3 * i
  local stream, entry = KEYS[tonumber(ARGV[at])], ARGV[at + 1]
  local where, count = holder(stream, group, consumer, entry)
  if where == 'own' then
    if ARGV[at + 2] ~= '' then
      count = ARGV[at + 2]
    end
    redis.call('XCLAIM', stream, group, consumer, 0, entry, 'RETRYCOUNT', count, 'JUSTID')
  end
  results[i] = where == 'lost' and 0 or 1
end
return results
