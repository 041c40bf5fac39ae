-- Grants the leases of addresses that no live replica encodes or holds.
-- KEYS: location, lease, for each address.
-- ARGV: token, time to live (ms), tokens of dead replicas, tokens of other replicas whose locations do not count.
-- Returns for each address: its location, or 1 if granted, or {token} of the replica that has the lease.
local token, ttl_ms, dead = ARGV[1], ARGV[2], set_of(ARGV[3])
local unwanted = set_of(token .. ARGV[3] .. ARGV[4])
local replies = {}
for i = 1, #KEYS, 2 do
  local location = without(get(KEYS[i]), unwanted)
  local holder = get(KEYS[i + 1])
  local reply = { holder }
  if location ~= '' then
    reply = location
  elseif holder == '' or holder == token or dead[holder] then
    redis.call('SET', KEYS[i + 1], token, 'PX', ttl_ms)
    reply = 1
  end
  replies[#replies + 1] = reply
end
return replies
