#!lua flags=allow-oom
-- May this worker run the entry it was just given? Whoever is told to hold it asks again when its turn has come.
-- KEYS: the tier's stream, reply, state, the other tier's stream
-- ARGV: group, consumer, entry, tier, deadline in ms or '', encoding,
--       attempts without new tokens after which it is given up, and from which it runs alone,
--       what for: 'run' it, 'hold' it until its turn comes, or it is 'due', its turn having come,
--       the attempt that it was told when it was held (read if due), 1 if the delivery count does not include this delivery, else 0,
--       TTL in ms of a state that is made here
-- Returns: verdict, attempt, now in ms, 1 if somebody streams it, output tokens published, enqueued_ms,
--          when any attempt began it first, when any had published its first token, and the vocabulary of the published tokens,
--          each nil if there is none
local stream, reply, state, other_stream = unpack(KEYS)
local group, consumer, entry, tier, deadline_ms, encoding = unpack(ARGV, 1, 6)
local max_attempts, alone_from, purpose, held_attempt, uncounted, state_ttl_ms = unpack(ARGV, 7, 12)

local where, published, count = standing(stream, group, consumer, entry, reply, state)
local now = now_ms()
local attempt = purpose == 'due' and tonumber(held_attempt) or math.max(1, count + tonumber(uncounted))
-- Attempts since the last one that published tokens, including that one: deaths before it no longer count.
local function attempts_since_progress()
  local progress = tonumber(redis.call('HGET', state, 'progress_attempt')) or 1
  return progress <= attempt and attempt - progress + 1 or attempt  -- a group that was made again counts from 1
end
local function answer(verdict)
  local known = redis.call('HMGET', state, 'stream', 'enqueued_ms', 'started_ms', 'first_token_ms', 'vocabulary')
  local enqueued = tonumber(known[2]) or tonumber(string.match(entry, '^%d+'))
  local began, had_token = tonumber(known[3]) or false, tonumber(known[4]) or false
  return { verdict, attempt, now, known[1] == '1' and 1 or 0, published, enqueued, began, had_token, known[5] }
end
if where == 'settled' then
  take_off(stream, group, entry)
  return answer('settled')
elseif where ~= 'own' then
  return answer('lost')
end

-- The same id was put on the queue twice: the first entry stands.
local first = redis.call('HMGET', state, 'entry', 'tier')
if first[1] and (first[1] ~= entry or first[2] ~= tier) then
  local there = redis.pcall('XRANGE', first[2] == tier and stream or other_stream, first[1], first[1])
  if not there.err and there[1] then
    take_off(stream, group, entry)
    return answer('duplicate')
  end
end

redis.call('HSETNX', state, 'enqueued_ms', string.match(entry, '^%d+'))
redis.call('HSET', state, 'tier', tier, 'entry', entry, 'encoding', encoding)
redis.call('PEXPIRE', state, state_ttl_ms, 'NX')
if deadline_ms ~= '' then
  redis.call('HSET', state, 'deadline_ms', deadline_ms)
end
local order = redis.call('HMGET', state, 'cancel', 'deadline_ms')
if order[1] and order[1] ~= '0' and order[1] ~= '' then
  return answer('cancelled')
end
if order[2] and (tonumber(order[2]) or now) < now then
  return answer('expired')
end
if purpose == 'due' then
  redis.call('XCLAIM', stream, group, consumer, 0, entry, 'RETRYCOUNT', attempt, 'JUSTID')
elseif attempts_since_progress() > tonumber(max_attempts) then
  return answer('poisoned')
elseif attempts_since_progress() >= tonumber(alone_from) then
  return answer('suspect')
elseif purpose == 'hold' then
  redis.call('HSET', state, 'status', 'queued')
  return answer('held')
end
redis.call('HSET', state, 'status', 'running', 'worker', consumer, 'attempt', attempt)
redis.call('HSETNX', state, 'started_ms', now)
return answer('run')
