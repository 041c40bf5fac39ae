-- Adds, renews or removes a replica in the list of live replicas, removes expired ones, and returns the others.
-- KEYS: the list, a hash of replica id to "deadline_ms epoch fingerprint load endpoint". All times are this server's.
-- ARGV: join, beat or leave; replica id, epoch, fingerprint, load, endpoint, time to live (ms).
-- Returns {'ok', 1 if it was listed already, {id, record, ...}}, {'mismatch', id, fingerprint} if a live replica serves
-- another model, or {'superseded', epoch} if a later start of the same replica has joined.
local verb, id, epoch, fingerprint, load, endpoint, ttl_ms = unpack(ARGV)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local deadline_ms = string.format('%.0f', now_ms + ttl_ms)
local was_present, others = 0, {}

local entries = redis.call('HGETALL', KEYS[1])
for i = 1, #entries, 2 do
  local deadline, its_epoch, its_fingerprint = string.match(entries[i + 1], '^(%d+) (%d+) (%S+) ')
  if deadline and tonumber(deadline) > now_ms + ttl_ms then -- the clock was set back: restart its time to live
    redis.call('HSET', KEYS[1], entries[i], (string.gsub(entries[i + 1], '^%d+', deadline_ms)))
  end
  if not deadline or tonumber(deadline) <= now_ms then
    redis.call('HDEL', KEYS[1], entries[i])
  elseif entries[i] == id then
    if its_epoch ~= epoch and verb ~= 'join' then
      return { 'superseded', its_epoch }
    end
    was_present = its_epoch == epoch and 1 or 0
  elseif its_fingerprint ~= fingerprint and verb ~= 'leave' then
    return { 'mismatch', entries[i], its_fingerprint }
  else
    others[#others + 1] = entries[i]
    others[#others + 1] = entries[i + 1]
  end
end

if verb == 'leave' then
  redis.call('HDEL', KEYS[1], id)
else
  local record = { deadline_ms, epoch, fingerprint, load, endpoint }
  redis.call('HSET', KEYS[1], id, table.concat(record, ' '))
  redis.call('PEXPIRE', KEYS[1], ttl_ms * 2)
end
return { 'ok', was_present, others }
