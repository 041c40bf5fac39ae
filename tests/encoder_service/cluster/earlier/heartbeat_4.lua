-- Adds, renews or removes a replica, removes expired ones, and returns all of them unless the caller knows them.
-- KEYS: the replicas, a hash of id to "epoch fingerprint endpoint"; their deadlines (ms), a sorted set of ids; the
-- version of the hash, which changes with it. All times are this server's.
-- ARGV: join, beat or leave; replica id, epoch, fingerprint, endpoint, time to live (ms), the version that it knows.
-- Returns {'ok', 1 if it was listed already, version} and, if that is another one, {id, record, ...};
-- {'mismatch', id, fingerprint} if a live replica serves another model; or {'superseded', epoch} if a later start of
-- the same replica has joined.
local KEPT_MS = 86400000 -- a list that no replica renews is removed after a day at most
local verb, id, epoch, fingerprint, endpoint, ttl_ms, known = unpack(ARGV)
local list, deadlines, versions = unpack(KEYS)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local deadline_ms = string.format('%.0f', now_ms + ttl_ms)
local record = epoch .. ' ' .. fingerprint .. ' ' .. endpoint
local changed = false

for _, dead in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', string.format('%.0f', now_ms))) do
  redis.call('HDEL', list, dead)
  redis.call('ZREM', deadlines, dead)
  changed = true
end
for _, late in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '(' .. deadline_ms, '+inf')) do
  redis.call('ZADD', deadlines, deadline_ms, late) -- the clock was set back: restart its time to live
end

local listed = redis.call('HGET', list, id)
local its_epoch = listed and string.match(listed, '^%d+')
if its_epoch and its_epoch ~= epoch and verb ~= 'join' then
  return { 'superseded', its_epoch }
end
if verb == 'leave' then
  redis.call('HDEL', list, id)
  redis.call('ZREM', deadlines, id)
  changed = true
else
  if listed ~= record then -- it joins, or was expired
    local entries = redis.call('HGETALL', list)
    for i = 1, #entries, 2 do
      local its_fingerprint = string.match(entries[i + 1], '^%d+ (%S+)') or ''
      if entries[i] ~= id and its_fingerprint ~= fingerprint then
        return { 'mismatch', entries[i], its_fingerprint }
      end
    end
    redis.call('HSET', list, id, record)
    changed = true
  end
  redis.call('ZADD', deadlines, deadline_ms, id)
end

local version = redis.call('GET', versions)
if changed or not version then
  -- Never one that it had before, even if this server lost its memory.
  local now_us = time[1] * 1000000 + time[2]
  version = string.format('%.0f', math.max(now_us, (tonumber(version) or 0) + 1))
  redis.call('SET', versions, version)
end
if redis.call('PTTL', list) < KEPT_MS / 2 then
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, KEPT_MS)
  end
end
local reply = { 'ok', its_epoch == epoch and 1 or 0, version }
if version ~= known then
  reply[4] = redis.call('HGETALL', list)
end
return reply
