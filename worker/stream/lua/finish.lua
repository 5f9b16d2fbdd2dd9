#!lua flags=allow-oom
-- Reply and ack: the only place where a request ends. Also answers if entry and group were deleted meanwhile,
-- since then no other worker can.
-- KEYS: the tier's stream, reply, state, dead letters
-- ARGV: group, consumer, entry, tier, attempt, encoding,
--       frame type, body, status, code, reply TTL in ms, state TTL in ms,
--       last tokens' frame: first token, first token after it, body (all '' if it is not streamed),
--       dead letter's message or '', prompt tokens, completion tokens (both '' if it did not succeed),
--       when the first token came or ''
-- Returns: 'written', 'settled', 'lost' or 'behind'; the number of tokens now published
local stream, reply, state, dead = unpack(KEYS)
local group, consumer, entry, tier, attempt, encoding = unpack(ARGV, 1, 6)
local frame_type, body, status, code, reply_ttl_ms, state_ttl_ms = unpack(ARGV, 7, 12)
local tail_first, tail_after, tail_body = unpack(ARGV, 13, 15)
local dead_message, prompt_tokens, completion_tokens, first_token_ms = unpack(ARGV, 16, 19)

local where, published = standing(stream, group, consumer, entry, reply, state)
if where == 'lost' then
  return { 'lost', published }
elseif where == 'settled' then
  take_off(stream, group, entry)
  local by = redis.call('HMGET', state, 'worker', 'attempt', 'status')
  local ours = by[1] == consumer and by[2] == attempt and by[3] == status  -- our own call, whose reply was lost
  return { ours and 'written' or 'settled', published }
end
if tail_first ~= '' then
  local first, after = tonumber(tail_first), tonumber(tail_after)
  if published ~= first and published ~= after then
    return { 'behind', published }
  end
  if published < after then
    published = after
    redis.call('XADD', reply, '*', 'type', 'tokens', 'attempt', attempt, 'tokens', published, encoding, tail_body)
  end
end
local now = now_ms()
if dead_message ~= '' then
  claim_key(dead, 'stream')
  local request = redis.pcall('XRANGE', stream, entry, entry)
  local letter = not request.err and request[1] and request[1][2] or {}
  local death = { 'dead_code', code, 'dead_message', dead_message, 'dead_tier', tier, 'dead_attempts', attempt - 1,
    'dead_worker', redis.call('HGET', state, 'worker') or consumer, 'dead_ms', now, 'dead_entry', entry }
  for i = 1, #death do
    letter[#letter + 1] = death[i]
  end
  redis.call('XADD', dead, '*', unpack(letter))
end
redis.call('XADD', reply, '*', 'type', frame_type, 'attempt', attempt, encoding, body)
redis.call('PEXPIRE', reply, reply_ttl_ms)
redis.call('HSET', state, 'status', status, 'code', code, 'tier', tier, 'attempt', attempt, 'worker', consumer, 'finished_ms', now)
if prompt_tokens ~= '' then
  redis.call('HSET', state, 'prompt_tokens', prompt_tokens, 'completion_tokens', completion_tokens)
end
if first_token_ms ~= '' then
  redis.call('HSETNX', state, 'first_token_ms', first_token_ms)
end
redis.call('PEXPIRE', state, state_ttl_ms)
take_off(stream, group, entry)
return { 'written', published }
