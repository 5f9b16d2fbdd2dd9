#!lua flags=allow-oom
-- Reply and ack: the one place where a request ends. Also answers where entry and group were deleted under the worker,
-- since then nobody else can.
-- KEYS: the tier's stream, reply, state, dead letters
-- ARGV: group, consumer, entry, tier, attempt, encoding, frame type, body, status, code, reply TTL ms, state TTL ms,
--       last tokens' frame: first token, first token after it, body (all '' where nobody streams), dead letter's message or '',
--       prompt tokens, completion tokens (both '' where it did not succeed), when the first token came, or ''
-- Returns: 'written', 'settled', 'lost' or 'behind'; the number of tokens that stand published
local stream, reply, state, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, consumer, entry, tier, attempt, encoding = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

local where, published = standing(stream, group, consumer, entry, reply, state)
if where == 'lost' then
  return { 'lost', published }
elseif where == 'settled' then
  take_off(stream, group, entry)
  local by = redis.call('HMGET', state, 'worker', 'attempt', 'status')
  local ours = by[1] == consumer and by[2] == attempt and by[3] == ARGV[9]  -- our own call, whose reply was lost
  return { ours and 'written' or 'settled', published }
end
if ARGV[13] ~= '' then
  local first, after = tonumber(ARGV[13]), tonumber(ARGV[14])
  if published ~= first and published ~= after then
    return { 'behind', published }
  end
  if published < after then
    published = after
    redis.call('XADD', reply, '*', 'type', 'tokens', 'attempt', attempt, 'tokens', published, encoding, ARGV[15])
  end
end
local now = now_ms()
if ARGV[16] ~= '' then
  claim_key(dead, 'stream')
  local request = redis.pcall('XRANGE', stream, entry, entry)
  local letter = not request.err and request[1] and request[1][2] or {}
  local death = { 'dead_code', ARGV[10], 'dead_message', ARGV[16], 'dead_tier', tier, 'dead_attempts', attempt - 1,
    'dead_worker', redis.call('HGET', state, 'worker') or consumer, 'dead_ms', now, 'dead_entry', entry }
  for i = 1, #death do
    letter[#letter + 1] = death[i]
  end
  redis.call('XADD', dead, '*', unpack(letter))
end
redis.call('XADD', reply, '*', 'type', ARGV[7], 'attempt', attempt, encoding, ARGV[8])
redis.call('PEXPIRE', reply, ARGV[11])
redis.call('HSET', state, 'status', ARGV[9], 'code', ARGV[10], 'tier', tier, 'attempt', attempt, 'worker', consumer, 'finished_ms', now)
if ARGV[17] ~= '' then
  redis.call('HSET', state, 'prompt_tokens', ARGV[17], 'completion_tokens', ARGV[18])
end
if ARGV[19] ~= '' then
  redis.call('HSETNX', state, 'first_token_ms', ARGV[19])
end
redis.call('PEXPIRE', state, ARGV[12])
take_off(stream, group, entry)
return { 'written', published }
