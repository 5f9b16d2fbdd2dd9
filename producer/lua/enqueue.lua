-- Put a request on its tier's stream, once per id.
--
-- KEYS  1 stream  2 state  3 reply  4 limits
-- ARGV  1 tier  2 default depth limit or ''  3 deadline: '' none, '+<ms>' from now, '<ms>' absolute
--       4 state TTL ms  5 reply TTL ms  6 finished state's TTL ms  7 encoding  8 body of a CANCELLED error in it
--       9... the entry's fields and values, without enqueued_ms and deadline_ms
-- Returns {'queued', enqueued_ms, deadline_ms or ''}
--         {'exists', status}      the id is known: nothing was added
--         {'cancelled'}           a cancellation came first: the reply is there
--         {'full', depth, limit}  nothing was written
local known = redis.call('HMGET', KEYS[2], 'status', 'cancel')
if known[1] then
    return {'exists', known[1]}
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local now = string.format('%.0f', now_ms)

if known[2] then
    redis.call('XADD', KEYS[3], '*', 'type', 'error', 'attempt', '1', ARGV[7], ARGV[8])
    redis.call('PEXPIRE', KEYS[3], ARGV[5])
    redis.call('HSET', KEYS[2], 'status', 'cancelled', 'code', 'CANCELLED', 'tier', ARGV[1], 'encoding', ARGV[7],
        'enqueued_ms', now, 'finished_ms', now)
    redis.call('PEXPIRE', KEYS[2], ARGV[6])
    return {'cancelled'}
end

local limit = redis.call('HGET', KEYS[4], 'max_depth:' .. ARGV[1]) or ARGV[2]
if limit ~= '' then
    local depth = redis.call('XLEN', KEYS[1])
    if depth >= tonumber(limit) then
        return {'full', depth, limit}
    end
end

local deadline = ARGV[3]
if string.sub(deadline, 1, 1) == '+' then
    deadline = string.format('%.0f', now_ms + tonumber(string.sub(deadline, 2)))
end
local fields = {'enqueued_ms', now}
if deadline ~= '' then
    fields[3], fields[4] = 'deadline_ms', deadline
end
for i = 9, #ARGV do
    fields[#fields + 1] = ARGV[i]
end
local entry = redis.call('XADD', KEYS[1], '*', unpack(fields))
redis.call('HSET', KEYS[2], 'status', 'queued', 'tier', ARGV[1], 'entry', entry, 'encoding', ARGV[7], 'enqueued_ms', now)
if deadline ~= '' then
    redis.call('HSET', KEYS[2], 'deadline_ms', deadline)
end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return {'queued', now, deadline}
