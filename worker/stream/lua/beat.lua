#!lua flags=allow-oom
-- A worker's heartbeat. Allowed when memory is full: it overwrites the old one, and a worker without one would be taken for dead.
-- The names of the workers are kept beside it, so that no reader has to scan the keys; those of dead workers are removed.
-- KEYS: the worker's hash, the workers' names
-- ARGV: the worker's name, TTL in ms, then fields and values
-- Returns: 'OK'
local worker, workers = unpack(KEYS)
local name, ttl_ms = unpack(ARGV, 1, 2)
local fields = { unpack(ARGV, 3) }

claim_key(worker, 'hash')
redis.call('HSET', worker, unpack(fields))
redis.call('PEXPIRE', worker, ttl_ms)

claim_key(workers, 'zset')
local now = now_ms()
redis.call('ZADD', workers, string.format('%.0f', now + ttl_ms), name)
redis.call('ZREMRANGEBYSCORE', workers, '-inf', string.format('%.0f', now))
return redis.status_reply('OK')
