#!lua flags=allow-oom
-- A worker's heartbeat. Allowed when memory is full: it overwrites what is there, and a worker without one would be taken for dead.
-- KEYS: the worker's hash
-- ARGV: TTL in ms, then fields and values
claim_key(KEYS[1], 'hash')
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return redis.status_reply('OK')
