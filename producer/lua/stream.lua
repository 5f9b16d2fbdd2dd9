-- Ask for a frame every step of a request that was submitted without `stream`.
--
-- KEYS  1 state  2 control
-- ARGV  1 id
-- Returns its status, or 'unknown'; a final one, or a request that streams already, is left alone.
local state = redis.call('HMGET', KEYS[1], 'status', 'stream')
local status = state[1] or 'unknown'
if (status == 'queued' or status == 'running') and state[2] ~= '1' then
    redis.call('HSET', KEYS[1], 'stream', '1')
    redis.call('XADD', KEYS[2], 'MAXLEN', '~', '10000', '*', 'op', 'stream', 'id', ARGV[1])
end
return status
