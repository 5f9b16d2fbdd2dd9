#!lua flags=allow-oom
-- Cancel a request: answer it at once if no worker has it, else order its worker to do so.
-- Allowed when memory is full: cancelling frees some.
-- KEYS: reply, state, control
-- ARGV: id, body of a CANCELLED error in msgpack, the same in JSON, reply TTL in ms, finished state's TTL in ms,
--       length to which the control stream is trimmed
-- Returns: 'finished'    it had its final reply already: no effect
--          'cancelled'   it was queued and is answered now; its entry stays until a worker discards it
--          'cancelling'  it is running: its worker is told
--          'unknown'     it has no state: workers are told. If it was put bare and waits, it is cancelled when a worker takes it;
--                        while the cancellation is remembered, an enqueue under this id is refused
local reply, state, control = unpack(KEYS)
local id, msgpack_body, json_body, reply_ttl_ms, state_ttl_ms, control_length = unpack(ARGV)

local known = redis.call('HMGET', state, 'status', 'encoding', 'attempt')
local status, encoding, attempt = known[1], known[2] or 'json', known[3] or '1'
if status == 'done' or status == 'failed' or status == 'cancelled' then
  return 'finished'
end

if status == 'queued' then
  local time = redis.call('TIME')
  local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
  redis.call('XADD', reply, '*', 'type', 'error', 'attempt', attempt, encoding, encoding == 'msgpack' and msgpack_body or json_body)
  redis.call('PEXPIRE', reply, reply_ttl_ms)
  redis.call('HSET', state, 'status', 'cancelled', 'code', 'CANCELLED', 'cancel', '1', 'finished_ms', now)
  redis.call('PEXPIRE', state, state_ttl_ms)
  return 'cancelled'
end

redis.call('HSET', state, 'cancel', '1')
redis.call('XADD', control, 'MAXLEN', '~', control_length, '*', 'op', 'cancel', 'id', id)
if status then
  return 'cancelling'
end
redis.call('PEXPIRE', state, state_ttl_ms)
return 'unknown'
