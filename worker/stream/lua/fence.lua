-- Shared by the worker's scripts; the loader inserts it after each one's first line.

local FINAL = { done = true, failed = true, cancelled = true }

-- Our keys hold only what we put there: a key of another type would block every reply, so it is removed.
local function claim_key(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then
    redis.call('DEL', key)
  end
end

-- Of a reply stream: the number of output tokens published, and whether its last frame ends it.
local function progress(reply)
  local last = redis.call('XREVRANGE', reply, '+', '-', 'COUNT', 1)[1]
  local published, ended = 0, false
  if last then
    local fields = last[2]
    for i = 1, #fields, 2 do
      if fields[i] == 'tokens' then
        published = tonumber(fields[i + 1]) or 0
      elseif fields[i] == 'type' then
        ended = fields[i + 1] == 'final' or fields[i + 1] == 'error'
      end
    end
  end
  return published, ended
end

-- The holder of an entry: 'own' (this consumer, with the delivery count), 'lost' (another has it, or the group
-- will deliver it again), or 'gone' (entry and pending record were deleted: no other worker will get it).
local function holder(stream, group, consumer, entry)
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1)
  if not pending.err and pending[1] then
    if pending[1][2] == consumer then
      return 'own', pending[1][4]
    end
    return 'lost', 0
  end
  local there = redis.pcall('XRANGE', stream, entry, entry)
  if not there.err and there[1] then
    return 'lost', 0
  end
  return 'gone', 0
end

-- The fence before every write for a request: 'settled' if it has its final reply, else as `holder`;
-- then the number of output tokens published and the delivery count.
local function standing(stream, group, consumer, entry, reply, state)
  claim_key(reply, 'stream')
  claim_key(state, 'hash')
  local published, ended = progress(reply)
  if ended or FINAL[redis.call('HGET', state, 'status')] then
    return 'settled', published, 0
  end
  local where, count = holder(stream, group, consumer, entry)
  return where, published, count
end

-- Take an entry off the queue: acked and deleted together, so that XLEN stays queued + running.
local function take_off(stream, group, entry)
  redis.pcall('XACK', stream, group, entry)
  redis.pcall('XDEL', stream, entry)
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
