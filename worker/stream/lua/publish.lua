#!lua
-- Publish token frames of many requests. A frame is added only if it continues what is published, so a call that is
-- sent twice, or after the server lost its last writes, leaves neither repeat nor gap.
-- KEYS: both tiers' streams, then for each frame: reply, state
-- ARGV: group, consumer, TTL in ms,
--       then for each frame: tier's index, entry, attempt, first token, first token after it, encoding, body,
--       when the first token came or '', the vocabulary of its token ids or ''
-- Returns for each frame: the number of tokens now published, -1 (lost) or -2 (settled)
local streams = { KEYS[1], KEYS[2] }
local group, consumer, ttl_ms = unpack(ARGV, 1, 3)

local function note(state, command, field, value)
  if redis.call('EXISTS', state) == 1 then  -- one made here would never expire
    redis.call(command, state, field, value)
  end
end

local results = {}
for i = 1, (#KEYS - 2) / 2 do
  local reply, state = unpack(KEYS, 1 + 2 * i, 2 + 2 * i)
  local at = 9 * i - 5
  local tier, entry, attempt, first, after, encoding, body, first_token_ms, vocabulary = unpack(ARGV, at, at + 8)
  local where, published = standing(streams[tonumber(tier)], group, consumer, entry, reply, state)
  if where == 'settled' then
    results[i] = -2
  elseif where == 'lost' then
    results[i] = -1
  else
    if published == tonumber(first) then
      if published == 0 and first_token_ms ~= '' then
        note(state, 'HSETNX', 'first_token_ms', first_token_ms)
      end
      if published == 0 and vocabulary ~= '' then
        note(state, 'HSET', 'vocabulary', vocabulary)
      end
      if attempt ~= '1' then
        note(state, 'HSET', 'progress_attempt', attempt)
      end
      published = tonumber(after)
      redis.call('XADD', reply, '*', 'type', 'tokens', 'attempt', attempt, 'tokens', published, encoding, body)
      redis.call('PEXPIRE', reply, ttl_ms)
    end
    results[i] = published
  end
end
return results
