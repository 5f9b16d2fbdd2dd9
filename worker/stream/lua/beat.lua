#!lua flags=allow-oom
-- A worker's heartbeat. Allowed when memory is full: it overwrites what is there, and a worker without one would be taken for dead.
-- The names of the workers are beside it, so that nobody has to search the keys; those that have died are taken out.
-- KEYS: the worker's hash, the workers' names
-- ARGV: the worker's name, TTL in ms, then fields and values
claim_key(KEYS[1], 'hash')
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[2])

claim_key(KEYS[2], 'zset')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[2], string.format('%.0f', now + ARGV[2]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))
return redis.status_reply('OK')
