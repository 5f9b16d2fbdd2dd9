#!lua flags=allow-oom
-- Cancel a request: answer it at once where no worker has it, else order its worker to.
-- Allowed when memory is full: it is a way out of that.
--
-- KEYS  1 state  2 reply  3 control
-- ARGV  1 id  2 body of a CANCELLED error in msgpack  3 the same in JSON  4 reply TTL ms  5 finished state's TTL ms
-- Returns 'finished'    it had its final reply already: no effect
--         'cancelled'   it was queued and is answered now; its entry stays until a worker discards it
--         'cancelling'  it is running: its worker is told
--         'unknown'     no such request yet: workers are told, and an enqueue under this id will be refused
local state = redis.call('HMGET', KEYS[1], 'status', 'encoding', 'attempt')
local status = state[1]
if status == 'done' or status == 'failed' or status == 'cancelled' then
    return 'finished'
end

if status == 'queued' then
    local encoding = state[2] or 'json'
    local time = redis.call('TIME')
    local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
    redis.call('XADD', KEYS[2], '*', 'type', 'error', 'attempt', state[3] or '1', encoding, encoding == 'msgpack' and ARGV[2] or ARGV[3])
    redis.call('PEXPIRE', KEYS[2], ARGV[4])
    redis.call('HSET', KEYS[1], 'status', 'cancelled', 'code', 'CANCELLED', 'cancel', '1', 'finished_ms', now)
    redis.call('PEXPIRE', KEYS[1], ARGV[5])
    return 'cancelled'
end

redis.call('HSET', KEYS[1], 'cancel', '1')
redis.call('XADD', KEYS[3], 'MAXLEN', '~', '10000', '*', 'op', 'cancel', 'id', ARGV[1])
if status then
    return 'cancelling'
end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 'unknown'
