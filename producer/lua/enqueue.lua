-- Put a request on its tier's stream, once per id.
-- KEYS: the tier's stream, reply, state, limits
-- ARGV: tier, default depth limit or '', deadline ('' none, '+<ms>' from now, '<ms>' absolute),
--       state TTL in ms, reply TTL in ms, finished state's TTL in ms, encoding, body of a CANCELLED error in it,
--       durable (1 if a WAITAOF follows on this connection, else 0),
--       then the entry's fields and values, without enqueued_ms and deadline_ms
-- Returns: {'queued', enqueued_ms, deadline_ms or ''}
--          {'exists', status}      the id is known: nothing was added
--          {'cancelled'}           a cancellation came first: the reply is there
--          {'full', depth, limit}  nothing was written
local stream, reply, state, limits = unpack(KEYS)
local tier, default_limit, deadline = unpack(ARGV, 1, 3)
local state_ttl_ms, reply_ttl_ms, finished_state_ttl_ms, encoding, cancelled_body, durable = unpack(ARGV, 4, 9)

local known = redis.call('HMGET', state, 'status', 'cancel')
local status, cancelled = known[1], known[2]
if status then
  if durable == '1' then
    redis.call('HSET', state, 'status', status) -- unchanged: WAITAOF waits for what its own connection wrote
  end
  return { 'exists', status }
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local now = string.format('%.0f', now_ms)

if cancelled then
  redis.call('XADD', reply, '*', 'type', 'error', 'attempt', '1', encoding, cancelled_body)
  redis.call('PEXPIRE', reply, reply_ttl_ms)
  redis.call('HSET', state, 'status', 'cancelled', 'code', 'CANCELLED', 'tier', tier, 'encoding', encoding,
    'enqueued_ms', now, 'finished_ms', now)
  redis.call('PEXPIRE', state, finished_state_ttl_ms)
  return { 'cancelled' }
end

local limit = redis.call('HGET', limits, 'max_depth:' .. tier) or default_limit
if limit ~= '' then
  local depth = redis.call('XLEN', stream)
  if depth >= tonumber(limit) then
    return { 'full', depth, limit }
  end
end

if string.sub(deadline, 1, 1) == '+' then
  deadline = string.format('%.0f', now_ms + tonumber(string.sub(deadline, 2)))
end
local fields = { 'enqueued_ms', now }
if deadline ~= '' then
  fields[3], fields[4] = 'deadline_ms', deadline
end
for i = 10, #ARGV do
  fields[#fields + 1] = ARGV[i]
end
local entry = redis.call('XADD', stream, '*', unpack(fields))
redis.call('HSET', state, 'status', 'queued', 'tier', tier, 'entry', entry, 'encoding', encoding, 'enqueued_ms', now)
if deadline ~= '' then
  redis.call('HSET', state, 'deadline_ms', deadline)
end
redis.call('PEXPIRE', state, state_ttl_ms)
return { 'queued', now, deadline }
