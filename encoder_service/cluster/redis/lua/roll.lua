-- The roll of live replicas: adds, renews or strikes one, strikes the lapsed, and returns the others.
-- KEYS: the roll, a hash of replica id to "deadline_ms epoch fingerprint load endpoint". Time is this server's alone.
-- ARGV: join, beat or leave; replica id, epoch, fingerprint, load, endpoint, time to live (ms).
-- Returns {'ok', 1 if it was on the roll already, {id, record, ...}}, {'mismatch', id, fingerprint} when a live replica
-- serves another model, or {'superseded', epoch} when a later start of the same replica has taken its place.
local verb, id, epoch, fingerprint, load, endpoint, ttl_ms = unpack(ARGV)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local deadline_ms = string.format('%.0f', now_ms + ttl_ms)
local was_present, others = 0, {}

local roll = redis.call('HGETALL', KEYS[1])
for i = 1, #roll, 2 do
  local deadline, its_epoch, its_fingerprint = string.match(roll[i + 1], '^(%d+) (%d+) (%S+) ')
  if deadline and tonumber(deadline) > now_ms + ttl_ms then -- the clock was set back since: its time begins now
    redis.call('HSET', KEYS[1], roll[i], (string.gsub(roll[i + 1], '^%d+', deadline_ms)))
  end
  if not deadline or tonumber(deadline) <= now_ms then
    redis.call('HDEL', KEYS[1], roll[i])
  elseif roll[i] == id then
    if its_epoch ~= epoch and verb ~= 'join' then
      return { 'superseded', its_epoch }
    end
    was_present = its_epoch == epoch and 1 or 0
  elseif its_fingerprint ~= fingerprint and verb ~= 'leave' then
    return { 'mismatch', roll[i], its_fingerprint }
  else
    others[#others + 1] = roll[i]
    others[#others + 1] = roll[i + 1]
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
