-- Adds, renews or removes a replica, removes expired ones, and returns all of them unless the caller knows them.
-- KEYS: the replicas, a hash of id to "epoch fingerprint endpoint"; their deadlines (ms), a sorted set of ids; the
-- version of the hash, which changes with it. All times are this server's.
-- All replicas have the same time to live: one with a shorter time would shorten the deadlines of the others.
-- ARGV: join, beat, renew (a beat that need not look for expired replicas) or leave; replica id, epoch, fingerprint,
-- endpoint, time to live (ms), the version that it knows.
-- Returns {'ok', 1 if it was listed already, version} and, if that is another one, {id, record, ...};
-- {'mismatch', id, fingerprint} if a live replica serves another model; or {'superseded', epoch} if a later start of
-- the same replica has joined.
local KEPT_MS = 86400000 -- a list that no replica renews is removed after a day at most
local verb, id, epoch, fingerprint, endpoint, ttl_ms, known = unpack(ARGV)
local list, deadlines, versions = unpack(KEYS)
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)
local deadline_ms = string.format('%.0f', now_ms + ttl_ms)
local version = redis.call('GET', versions)

if verb == 'renew' and version == known then -- it knows the list, and is in it
  redis.call('ZADD', deadlines, deadline_ms, id)
  return { 'ok', 1, version }
end

local function set_version()
  -- Never one that it had before, even if this server lost its memory.
  version = string.format('%.0f', math.max(now_us, (tonumber(version) or 0) + 1))
  redis.call('SET', versions, version)
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, KEPT_MS)
  end
end

local expired = redis.call('ZRANGEBYSCORE', deadlines, '-inf', string.format('%.0f', now_ms))
for _, dead in ipairs(expired) do
  redis.call('HDEL', list, dead)
  redis.call('ZREM', deadlines, dead)
end
for _, late in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '(' .. deadline_ms, '+inf')) do
  redis.call('ZADD', deadlines, deadline_ms, late) -- the clock was set back: restart its time to live, which is ours
end
if #expired > 0 or not version or now_us - version > KEPT_MS / 2 * 1000 then
  set_version()
end

local record = epoch .. ' ' .. fingerprint .. ' ' .. endpoint
local listed = redis.call('HGET', list, id)
local its_epoch = listed and string.match(listed, '^%d+')
if its_epoch and its_epoch ~= epoch and verb ~= 'join' then
  return { 'superseded', its_epoch }
end
if verb == 'leave' then
  redis.call('HDEL', list, id)
  redis.call('ZREM', deadlines, id)
  set_version()
elseif listed == record then
  redis.call('ZADD', deadlines, deadline_ms, id)
else -- it joins, or was expired
  local entries = redis.call('HGETALL', list)
  for i = 1, #entries, 2 do
    local its_fingerprint = string.match(entries[i + 1], '^%d+ (%S+)') or ''
    if entries[i] ~= id and its_fingerprint ~= fingerprint then
      return { 'mismatch', entries[i], its_fingerprint }
    end
  end
  redis.call('HSET', list, id, record)
  redis.call('ZADD', deadlines, deadline_ms, id)
  set_version()
end
local reply = { 'ok', its_epoch == epoch and 1 or 0, version }
if version ~= known then
  reply[4] = redis.call('HGETALL', list)
end
return reply
