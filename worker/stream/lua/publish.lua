#!lua
-- Publish token frames of many requests. A frame is added only where it continues what stands published, so a call that is
-- sent twice, or after the server lost its last writes, leaves neither repeat nor gap.
-- KEYS: both tiers' streams, then for each frame: reply, state
-- ARGV: group, consumer, TTL in ms, then for each frame: tier's index, entry, attempt, first token, first token after it, encoding, body,
--       when the first token came, or ''
-- Returns for each frame: the number of tokens that stand published now, -1 (lost) or -2 (settled)
local group, consumer, ttl = ARGV[1], ARGV[2], ARGV[3]
local results = {}
for i = 1, (#KEYS - 2) / 2 do
  local reply, state = KEYS[1 + 2 * i], KEYS[2 + 2 * i]
  local at = 8 * i - 4
  local stream, entry = KEYS[tonumber(ARGV[at])], ARGV[at + 1]
  local where, published = standing(stream, group, consumer, entry, reply, state)
  if where == 'settled' then
    results[i] = -2
  elseif where == 'lost' then
    results[i] = -1
  else
    if published == tonumber(ARGV[at + 3]) then
      if published == 0 and ARGV[at + 7] ~= '' and redis.call('EXISTS', state) == 1 then  -- one made here would never expire
        redis.call('HSETNX', state, 'first_token_ms', ARGV[at + 7])
      end
      published = tonumber(ARGV[at + 4])
      redis.call('XADD', reply, '*', 'type', 'tokens', 'attempt', ARGV[at + 2], 'tokens', published, ARGV[at + 5], ARGV[at + 6])
      redis.call('PEXPIRE', reply, ttl)
    end
    results[i] = published
  end
end
return results
