#!lua flags=allow-oom
-- Renew leases. The delivery count is set, not raised: being renewed, or claimed twice by one worker, is not an attempt.
-- KEYS: the tiers' streams
-- ARGV: group, consumer,
--       then for each entry: tier's index, entry, delivery count or '' to leave it
-- Returns for each entry: 1, or 0 if it is lost
local streams = KEYS
local group, consumer = unpack(ARGV, 1, 2)

local results = {}
for at = 3, #ARGV, 3 do
  local tier, entry, wanted_count = unpack(ARGV, at, at + 2)
  local stream = streams[tonumber(tier)]
  local where, count = holder(stream, group, consumer, entry)
  if where == 'own' then
    if wanted_count ~= '' then
      count = wanted_count
    end
    redis.call('XCLAIM', stream, group, consumer, 0, entry, 'RETRYCOUNT', count, 'JUSTID')
  end
  results[#results + 1] = where == 'lost' and 0 or 1
end
return results
