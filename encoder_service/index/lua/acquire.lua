-- Grants the lease of addresses that nobody encodes and no replica holds, except those ignored.
-- KEYS: location, lease, for each address. ARGV: token, time to live (ms), tokens ignored.
-- Returns for each address: its location, or 1 when granted, or 0 when another holds the lease.
local token, ttl_ms, ignored = ARGV[1], ARGV[2], ARGV[3]
local replies = {}
for i = 1, #KEYS, 2 do
  local location = without(get(KEYS[i]), ignored)
  local holder = get(KEYS[i + 1])
  local reply = 0
  if location ~= '' then
    reply = location
  elseif holder == '' or holder == token then
    redis.call('SET', KEYS[i + 1], token, 'PX', ttl_ms)
    reply = 1
  end
  replies[#replies + 1] = reply
end
return replies
