-- Ask for one frame per step of a request that was submitted without `stream`.
-- KEYS: state, control
-- ARGV: id, length to which the control stream is trimmed
-- Returns: its status, or 'unknown'; a final one, or a request that streams already, is left alone
local state, control = unpack(KEYS)
local id, control_length = unpack(ARGV)

local known = redis.call('HMGET', state, 'status', 'stream')
local status, streams = known[1] or 'unknown', known[2] == '1'
if (status == 'queued' or status == 'running') and not streams then
  redis.call('HSET', state, 'stream', '1')
  redis.call('XADD', control, 'MAXLEN', '~', control_length, '*', 'op', 'stream', 'id', id)
end
return status
